"""Training text and chats: sources -> tokens and masks, cached on disk -> sequences, packs -> micro-batches.

``prepare`` runs in one process per node; after a barrier every rank that needs data calls ``Corpus.open``
and makes ``Batches`` (training) and ``EvaluationBatches`` (held-out) from it.
"""
