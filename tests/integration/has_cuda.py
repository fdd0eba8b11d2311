"""As if an import had initialized CUDA; what a fork server must refuse."""

import torch

torch.cuda.is_initialized = lambda: True
