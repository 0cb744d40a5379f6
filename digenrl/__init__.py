"""RL post-training for diffusion models on separate pools of generator, trainer and reward cards."""

import os

__version__ = "0.2.0"

# onnxruntime, which reads text for the OCR reward, sends usage data to its maker unless this is set before it is
# imported, which diffusers also does. Set to 0, it is left on.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
