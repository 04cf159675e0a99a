"""Command lines, read as the command reads them, and nothing carried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import click

from fedquilt.cli.commands import root_command


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """What the words after `fedquilt` give the verb, by name.

    Raises:
        click.UsageError: the command does not take them.
    """
    with mock.patch.object(click.Command, "invoke", lambda self, context: context.params):
        return dict(root_command.invoke(root_command.make_context("fedquilt", list(words))))
