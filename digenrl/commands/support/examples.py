"""An example for every command that cannot be called without arguments, in the errors about them."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

EXAMPLES = {
    "check": "digenrl check sd3_one_gpu",
    "export": "digenrl export runs/demo-1 --to comfyui",
    "make-tiny": "digenrl make-tiny sd3 tiny_sd3",
    "plan": "digenrl plan sd3_flow_grpo --cluster examples/cluster_small.yaml",
    "profile": "digenrl profile demo",
    "report": "digenrl report runs/demo-1",
    "sample": "digenrl sample runs/demo-1 --prompt 'a cat on a beach'",
    "serve": "digenrl reward serve pickscore",
}


class GroupWithExamples(TyperGroup):
    """Commands whose errors about a required argument or option that is missing or wrong end with an example."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if error.ctx is None or not getattr(error.param, "required", False):
                raise
            error.show()
            typer.echo(f"For example: {EXAMPLES[error.ctx.command.name or '']}", err=True)
            raise typer.Exit(error.exit_code) from None
