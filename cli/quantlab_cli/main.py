"""Entry point: the group of commands, imported one by one when asked for, and every exit code.

0 done, 1 failed, 2 wrong usage, 3 finished with failed cells, 5 an asset is missing offline,
130 interrupted and resumable.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import click

from quantlab.errors import QuantlabError

# name → (module with a click command of that name, line of help): help imports none of them.
COMMANDS = {
    "kl": ("kl", "KL curves of low-precision states against FP32-state decoding."),
    "ablate": ("ablate", "Change rounding, window or corrections alone, and compare."),
    "propagate": ("propagate", "Watch how stored states drift from exact ones, head by head."),
    "attribute": ("attribute", "Which layers or heads a policy's KL comes from."),
    "predict": ("predict", "Predict KL from calibration statistics, and say how well."),
    "eval": ("eval", "Accuracy of long generations, by FP32 output length."),
    "bins": ("bins", "Bin finished accuracy runs again."),
    "report": ("report", "Draw figures and page of a run again, finished or not."),
    "cast": ("cast", "Quantize a tensor and say what it loses."),
    "check": ("check", "Test that a model's recurrence is run right here."),
    "ls": ("ls", "List formats, models, suites, policies or data."),
    "bench": ("bench", "Measure kernels and engine on a GPU, compare with targets."),
    "zoo": ("zoo", "The embedded models: list and train."),
}
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"quantlab_cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is told the nearest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no such command {args[0]!r}.{hint} Commands: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "QUANTLAB"},
)
@click.version_option(package_name="quantlab", prog_name="quantlab")
def cli() -> None:
    """Which format of the recurrent state is safe for this model, how far, and why.

    Start with: quantlab kl --model tiny-gdn --suite replayssm
    """


def _terminated(signum: int, frame: FrameType | None) -> None:
    # what a batch scheduler sends before it kills: end like on Ctrl-C, resumable
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: instead of those of the process.

    Returns:
        The exit code.
    """
    signal.signal(signal.SIGTERM, _terminated)
    # what transformers pulls in for weight formats that no study uses, and its complaints
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # obj: the command line as given, which a run records
        value = cli.main(
            args=arguments, prog_name="quantlab", standalone_mode=False, obj=tuple(arguments)
        )
        sys.stdout.flush()
        return value if isinstance(value, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except QuantlabError as error:
        click.echo(f"quantlab: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("quantlab: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader (head, less) has had enough; keep the interpreter from writing at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        click.echo("quantlab: this is a bug; please report it with the lines above", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
