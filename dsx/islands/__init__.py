"""Islands: copies of a whole job that train by themselves and now and then average how far they have moved."""
