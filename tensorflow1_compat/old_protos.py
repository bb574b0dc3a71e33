"""Modules that an old protoc made of `.proto` files: protobuf 4 refuses the descriptors that they make by hand.

Everything is in the description of the file, from which protobuf makes the classes, as a younger protoc lets it.
"""

from __future__ import annotations

import ast

__all__ = ["is_old_proto", "rewrite_proto"]

_BUILD = """
from google.protobuf.internal import builder as _builder
_builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
"""


def is_old_proto(path: str, source: bytes) -> bool:
    """Whether a file is such a module."""
    return path.endswith("_pb2.py") and b"descriptor.FileDescriptor(" in source


def rewrite_proto(tree: ast.Module) -> ast.Module:
    """Puts what a younger protoc writes in the place of all that comes after the description."""
    for number, statement in enumerate(tree.body):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "DESCRIPTOR":
            tree.body[number + 1 :] = ast.parse(_BUILD).body
            break
    return tree
