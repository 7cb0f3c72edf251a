"""Generate text from a checkpoint: dsx's in any layout, DeepSpeed's, a Hugging Face folder or PEFT's.

    python recipes/generate.py --checkpoint runs/zero3-pp1-dp2-tp1 --prompt "def main("
    python recipes/generate.py --checkpoint runs/zero3-pp1-dp2-tp1 --step 100 --temperature 0 --tokens 50
    python recipes/generate.py --checkpoint runs/chat_lora --chat --prompt "How deep is the lake?"
    python recipes/generate.py --checkpoint stock/global_step500 --model gpt2/ --tokenizer gpt2/

It runs in one process, and reads the weights from where they lie into a transformers model, without a
conversion.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import dsx


def main() -> None:
    """Read the checkpoint, print the prompt and the model's continuation."""
    arguments = parse_arguments()
    model, tokenizer = dsx.load_transformers(
        arguments.checkpoint,
        step=arguments.step,
        config=arguments.model,
        tokenizer=arguments.tokenizer,
        precision=arguments.precision,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
    )

    # The model is transformers' own: model.generate has beams, penalties and all the rest.
    if not arguments.chat:
        write(arguments.prompt)
    dsx.generate(
        model,
        tokenizer,
        arguments.prompt,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        show=write,
        chat=arguments.chat,
        chat_template=arguments.chat_template,
        chat_template_kwargs=arguments.chat_template_kwargs,
    )
    print()


def write(text: str) -> None:
    """Print to standard output, without anything that a terminal would obey."""
    print(dsx.printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="folder of a run, a checkpoint or a model")
    add("--prompt", default="", help="text to continue; without it, a document from its beginning")
    add("--chat", action="store_true", help="the prompt is a user's message: write the assistant's turn")
    add("--chat-template", help="Jinja file, or the template itself, in place of the tokenizer's own")
    told = 'what the template is told besides, as JSON: {"enable_thinking": false}'
    add("--chat-template-kwargs", type=json.loads, default={}, help=told)
    add("--tokens", type=int, default=200, help="at most so many (200)")
    add("--step", type=int, help="the run's checkpoint after this step; the latest by default")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token, always (0.8)")
    add("--top-k", type=int, default=0, help="draw from the likeliest so many tokens; 0: from all (0)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest with this probability (1)")
    add("--seed", type=int, default=0, help="of the draws (0)")
    add("--device", default="cpu", help="cpu, cuda or cuda:1 (cpu)")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="the weights' own by default")
    add("--model", type=Path, help="folder or config.json, for checkpoints that do not say what they are of")
    add("--tokenizer", help="bytes, folder or hub name; the one that the model was trained with by default")
    add("--trust-remote-code", action="store_true", help="run code that the model or the tokenizer brings")
    return parser.parse_args()


if __name__ == "__main__":
    dsx.run(main)
