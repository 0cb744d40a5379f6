"""Context parallelism (Ulysses): several ranks compute one forward, each for some of its tokens.

All ranks have the same weights and are called with the same arguments. All compute the embeddings; then each takes
its tokens through the blocks. For attention, ranks exchange their tokens of all heads for all tokens of some, and
back. At the end all get the velocity of all tokens, bitwise the same.

If all ranks compute the same loss from it, each gets a part of every parameter's gradient, and their sum is the
gradient that a single process computes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.models.blocks import change_arguments, repeated_blocks
from digenrl.models.contract import DiffusionModel
from digenrl.models.parallel.token_exchange import TokenExchange
from digenrl.models.passes.attention import AttentionCalls


def divide_tokens(model: DiffusionModel, exchange: TokenExchange) -> None:
    """Makes all forwards of a model collective operations of the exchange's ranks. Add adapters before."""
    check_ranks(model.family, model.self_attention, model.transformer, exchange.ranks)
    model.exchange = exchange
    blocks = repeated_blocks(model.transformer)
    for index, block in enumerate(blocks):
        change_arguments(block, functools.partial(_own_tokens, model, index == 0))
    layers = [getattr(block, name, None) for block in blocks for name in model.self_attention]
    processors = {id(layer.processor): layer.processor for layer in layers if layer is not None}
    for processor in processors.values():
        _attend_together(processor, exchange)
    last: nn.Module = model.transformer.get_submodule("proj_out")
    last.register_forward_hook(functools.partial(_gather_tokens, exchange))


def check_ranks(family: str, self_attention: tuple[str, ...], transformer: nn.Module, ranks: int) -> None:
    """Raises ConfigError if a family's forwards cannot be divided over this many ranks."""
    if not self_attention:
        raise ConfigError(
            f"{family} does not say how its tokens are divided (self_attention of its model class); "
            "use one card per sample"
        )
    heads: int = transformer.config.num_attention_heads  # type: ignore[union-attr,assignment]
    if heads % ranks:
        raise ConfigError(
            f"{ranks} cards per sample are too many for the {heads} attention heads of this {family} model: each "
            f"card computes equally many; use {' or '.join(map(str, _divisors(heads)))}"
        )


def _own_tokens(model: DiffusionModel, first: bool, given: dict[str, Any]) -> dict[str, Any]:
    """A block's arguments for this rank's tokens. The first block gets all tokens, the others what it returns."""
    assert model.exchange is not None
    if first:
        given |= _begin_forward(model.exchange, {name: given[name] for name in model.block_state_arguments})
    return given | model.own_arguments(given, model.exchange.shares)


def _begin_forward(exchange: TokenExchange, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    image, text = states["hidden_states"], states.get("encoder_hidden_states")
    shares = exchange.begin(image.shape[1], 0 if text is None else text.shape[1])
    own = {"hidden_states": shares.own(image, 1, "image")}
    return own if text is None else own | {"encoder_hidden_states": shares.own(text, 1, "text")}


def _attend_together(processor: Any, exchange: TokenExchange) -> None:
    """Makes an attention processor of diffusers attend to the tokens of all ranks."""
    kind = type(processor)

    class AllTokens(kind):  # type: ignore[misc,valid-type]
        @functools.wraps(kind.__call__)  # diffusers reads its signature
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            with _ExchangedAttention(exchange) as attention:
                result = super().__call__(*arguments, **named)
            if not attention.exchanged:
                raise RuntimeError(
                    f"{kind.__name__} did not call torch's scaled_dot_product_attention, so that the tokens of "
                    "other cards would be left out; unset DIFFUSERS_ATTN_BACKEND, or use one card per sample"
                )
            return result

    processor.__class__ = AllTokens


class _ExchangedAttention(AttentionCalls):
    """Inside, torch's attention is that between the tokens of all ranks."""

    def __init__(self, exchange: TokenExchange) -> None:
        super().__init__()
        self._exchange, self.exchanged = exchange, False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *further: Any, **named: Any) -> Tensor:
        self.exchanged = True
        return self._exchange.attend(query, key, value, *further, **named)


def _gather_tokens(exchange: TokenExchange, layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return exchange.gather(output, 1, "image")


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
