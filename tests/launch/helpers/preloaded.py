"""What the server of forked processes has imported before it forks (see forked.py)."""

import os

# Read by the libraries as they are imported.
os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", DS_LOG_LEVEL="warning")

import deepspeed.runtime.pipe.engine  # noqa: E402
import deepspeed.runtime.zero.muon.original_muon  # noqa: E402, F401  (it compiles: all of dynamo)
import torch.utils.tensorboard  # noqa: E402, F401

import alibi_lm.cli.distributed  # noqa: E402
import alibi_lm.train.run  # noqa: E402, F401
