"""Any rank of any layout on one laptop: the real engine, tensors without storage, a group without peers."""
