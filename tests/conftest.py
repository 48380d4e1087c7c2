"""Settings of all tests; its place also puts the helpers in this folder on the import path."""

import torch

torch.set_num_threads(1)
