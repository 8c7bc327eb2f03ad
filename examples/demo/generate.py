"""Text from a checkpoint of the demo: one process, whatever number of ranks has trained it.

Takes Megatron's flags, ``--load`` among them, and those of ``generation_options`` below.
``run.py`` calls it at the end.
"""

import accel.megatron_adaptor  # noqa: F401  (the one line)

# isort: split
import argparse
import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args, get_tokenizer
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import initialize_megatron


def generation_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Our flags beside Megatron's."""
    group = parser.add_argument_group("generation")
    group.add_argument("--prompts", type=Path, help="JSON file: a list of texts to continue")
    group.add_argument("--texts", type=Path, help="JSON file to write: the prompts, continued")
    group.add_argument("--num-tokens", type=int, default=60, help="for each prompt")
    group.add_argument("--temperature", type=float, default=0.6)
    return parser


def load_model() -> torch.nn.Module:
    """The model of ``--load``, with the shards of all training ranks put together."""
    config = gpt_config_from_args(get_args())
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models = builder.build_distributed_models(groups, wrap_with_ddp=False)
    load_checkpoint(models, None, None)
    return models[0].eval()


@torch.inference_mode()
def continued(
    model: torch.nn.Module, tokenizer: Any, prompt: str, num_tokens: int, temperature: float
) -> str:
    """``prompt`` and up to ``num_tokens`` sampled tokens more; ends early at the end of a file.

    The whole text goes through the model for each token: at demo sizes that is quick, and there is
    no cache to get wrong.
    """
    limit = get_args().max_position_embeddings
    ids = list(tokenizer.tokenize(prompt))
    for _ in range(min(num_tokens, limit - len(ids))):
        tokens_BT = torch.tensor([ids], device="cuda")
        positions_BT = torch.arange(len(ids), device="cuda")[None]
        logits_V = model(tokens_BT, positions_BT, None)[0, -1].float()
        probabilities_V = torch.softmax(logits_V / temperature, dim=-1)
        next_id = int(torch.multinomial(probabilities_V, 1))
        if next_id == tokenizer.eod:
            break
        ids.append(next_id)
    return tokenizer.detokenize(ids)


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=generation_options)
    initialize_megatron()
    model = load_model()
    tokenizer = get_tokenizer()
    prompts = json.loads(args.prompts.read_text())
    texts = [
        continued(model, tokenizer, prompt, args.num_tokens, args.temperature) for prompt in prompts
    ]
    args.texts.write_text(json.dumps(texts, indent=2))


if __name__ == "__main__":
    main()
