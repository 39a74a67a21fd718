"""Command-line options that mirror the fields of a dataclass: names, types, defaults, help."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
"""Every command has it."""


def dataclass_options(
    cls: type, parameter: str, *, skip: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one option per field of `cls`.

    The decorated function receives their values, as keyword values of `cls`, in its keyword-only
    argument `parameter`. Mappings have no spelling on a command line; put them into `skip`.
    """
    options = [_option(cls, name, text, parameter) for name, text in field_docs(cls).items()]
    options = [option for option in options if option.name not in skip]
    names = [option.name for option in options]
    tuples = {field.name for field in fields(cls) if isinstance(field.default, tuple)}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            chosen = {name: values.pop(name) for name in names}
            lists = {name: tuple(chosen[name] or ()) for name in names if name in tuples}
            values[parameter] = chosen | lists
            function(**values)

        signature = inspect.signature(function)
        own = [each for name, each in signature.parameters.items() if name != parameter]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in [*own, *options]}
        return command

    return decorate


def field_docs(cls: type) -> dict[str, str]:
    """Each field's documentation: the string literal below it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def _option(cls: type, name: str, text: str, panel: str) -> inspect.Parameter:
    field = next(field for field in fields(cls) if field.name == name)
    default = field.default
    if default is MISSING:
        assert field.default_factory is not MISSING
        default = field.default_factory()
    kind = _without_none(get_type_hints(cls)[name])
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], None  # type: ignore[misc]
    option = typer.Option(help=text, rich_help_panel=f"{panel.capitalize()} options")
    annotation: Any = Annotated[kind | None if default is None else kind, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _without_none(kind: Any) -> Any:
    """The type inside `T | None`."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (arg for arg in get_args(kind) if arg is not NoneType)
    return kind
