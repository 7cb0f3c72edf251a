"""Islands: copies of a whole job that train apart and now and then average how far they have moved."""
