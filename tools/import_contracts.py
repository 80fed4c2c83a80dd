"""A type of contract for import-linter: layers of which one holds whatever the others do not name.

So a package with one folder of a kind for each device has all of them in its layers, and a new one needs no line.
Registered in `pyproject.toml`; `tests/test_layers.py` tries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast, final

import grimp
from importlinter.contracts.layers import Layer, LayersContract, ModuleTail
from importlinter.domain.contract import ContractCheck, InvalidContractOptions
from importlinter.domain.fields import ListField

REST: Final = "*"
"""Stands for what no other layer names."""


@final
class OpenLayersContract(LayersContract):
    """As `layers`, with one container; one layer is `*`, whose modules do not know each other.

    Always exhaustive: whatever is in the container is in a layer.
    """

    def validate(self) -> None:
        """Raise InvalidContractOptions for anything but one container, and one layer that is `*` alone."""
        super().validate()
        if len(self.contract_options.get("containers", ())) != 1:
            raise InvalidContractOptions({"containers": "Open layers have one container."})
        if [x.module_tails for x in self._layers()].count({ModuleTail(REST)}) != 1:
            raise InvalidContractOptions({"layers": f"One layer is '{REST}' alone."})

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """With the modules that `*` stands for now."""
        container = str(self.contract_options["containers"][0])
        there = {name.rpartition(".")[-1] for name in graph.find_children(container)}
        named = {tail.name for layer in self._layers() for tail in layer.module_tails}
        rest = Layer({ModuleTail(name) for name in there - named})
        layers = [rest if x.module_tails == {ModuleTail(REST)} else x for x in self._layers()]
        self.layers = cast("ListField", [x for x in layers if x.module_tails])
        return super().check(graph, verbose)

    def _layers(self) -> Sequence[Layer]:
        return cast("Sequence[Layer]", self.layers)
