#!/usr/bin/env python
"""What each rank's memory will hold, before a run: ``dsx estimate`` from a checkout.

``python tools/estimate_memory.py configs/llama3_8b_8gpu.json --gpus 8 --gpu-memory 79``, or
``python tools/estimate_memory.py --model llama-3-70b --gpus 64 --tensor 8 --pipeline 4``.
"""

from __future__ import annotations

import sys

from dsx.cli.app import main

if __name__ == "__main__":
    sys.argv = ["dsx", "estimate", *sys.argv[1:]]
    main()
