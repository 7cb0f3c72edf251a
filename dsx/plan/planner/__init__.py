"""Which layout trains a model fastest on a cluster, from a model of the step's time and the memory ledger.

:mod:`.kernels` says what the layers compute and move, :mod:`.layer_times` and :mod:`.collectives` what that
takes, :mod:`.pipeline` runs a schedule on it with dsx's own simulator, :mod:`.step_time` adds what surrounds
the pipeline, :mod:`.search` ranks layouts.
"""
