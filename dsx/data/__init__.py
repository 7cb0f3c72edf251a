"""Training text: sources -> tokens, cached on disk -> packed sequences -> micro-batches.

``prepare`` runs on one process per node; after a barrier every rank that needs data calls ``Corpus.open``
and takes ``Batches`` (training) and ``EvaluationBatches`` (held-out) of it.
"""
