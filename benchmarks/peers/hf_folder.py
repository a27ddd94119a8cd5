"""Write a GGUF file's model as a folder in Hugging Face form, float32, for peers that read nothing else.

python hf_folder.py MODEL.gguf FOLDER     (needs transformers, gguf and accelerate)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model read from GGUF counts as quantized and refuses to be saved: its values go into a fresh one.
    config = type(read.config)(**{key: value for key, value in read.config.to_dict().items() if "quant" not in key})
    config.architectures = [type(read).__name__]
    fresh = type(read)(config)
    fresh.load_state_dict(read.state_dict())
    fresh.tie_weights()
    fresh.generation_config = GenerationConfig.from_model_config(config)
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main()
