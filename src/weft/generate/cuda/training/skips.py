"""The text of `chain` for networks with skips: values that several layers read, sums of values, parts of the input.

Upwards a layer multiplies what it reads value by value: the last one from registers, the others from where this warp
left them, or from the input matrix. Downwards a value's gradient is the sum of what each of its readers gives: all
shares but the last lie, rounded to 16 bits as torch's are, in the record of the tile, which the same lanes read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.cuda.training.activation import Activation
from weft.generate.cuda.training.chain import Chain, Panel, panel_share
from weft.generate.cuda.training.network import Network, Segment
from weft.generate.expr.integer import Int

DEEPEST = 24
"""Layers, all of which are written out."""


def panel_bytes(net: Network) -> int:
    """Of the largest panel of a network with skips."""
    most = 0
    for layer in range(net.depth):
        n = net.width(layer + 1) // 16
        for s in net.segments(layer):
            k = net.width(s.value) // 16
            most = max(most, panel_share(k) * n, panel_share(n) * k)
    return 512 * most


@dataclass(frozen=True, slots=True)
class SkipChain(Chain):
    """The kernel."""

    noted: list[Panel] = field(default_factory=list)
    """Panels in the order in which the text reads them."""

    def _order(self) -> list[Panel]:
        self.noted.clear()
        self._up()
        self._down()
        found = list(self.noted)
        self.noted.clear()
        return found

    def _panel_bytes(self) -> int:
        return panel_bytes(self.net)

    def _panels(self, layer: int, s: Segment, *, up: bool) -> list[Panel]:
        """What the product of a layer and one of its values reads."""
        k, n = self.net.width(s.value) // 16, self.net.width(layer + 1) // 16
        base = self.plan.weights[layer] + s.first * n * 512
        share = panel_share(k if up else n)
        found = []
        for first in range(0, k if up else n, share):
            last = min(k if up else n, first + share)
            if up:
                found.append(Panel(first, last, base + first * n * 512, 1, 0, (last - first) * n * 512))
            else:
                found.append(Panel(first, last, base + first * 512, k, n * 512, (last - first) * 512))
        return found

    def _times(
        self, layer: int, s: Segment, left: str, *, up: bool, turn: str = "", others: range = range(0)
    ) -> list[str]:
        """d += left times the weights between a layer and one of its values, or their transposed.

        In a loop `turn` is the way to the weights of the layers beyond, which are `others`.
        """
        k, n = self.net.width(s.value) // 16, self.net.width(layer + 1) // 16
        name, tiles = "w_up" if up else "w_down", self.shape.tiles
        if not self.shape.slots:
            place = f"{Int('base') + f'{self.plan.weights[layer] + s.first * n * 512}u'}{turn}"
            return [f"{name}<{k}, {n}, {tiles}, 0, {k if up else n}>(d, {left}, {place}, lane);"]
        lines, slots = [], self.shape.slots
        place = f"base + slot * {panel_bytes(self.net)}u"
        for p in self._panels(layer, s, up=up):
            self.noted.append(p)
            lines += [
                f"w_arrived<{slots - 2}>(); role.sync(); ask();",
                f"{name}<{k}, {n}, {tiles}, {p.first}, {p.last}>(d, {left}, {place}, lane);",
                f"if (++slot == {slots}) slot = 0;",
            ]
        for other in others:
            self.noted.extend(self._panels(other, self.net.segments(other)[0], up=up))
        return lines

    def _run(self, start: int, *, up: bool) -> int:
        """How many layers from one on, upwards or downwards, are one loop: alike, and nothing comes in or is read."""
        first, count, step = self._form(start, up=up), 1, 1 if up else -1
        if first is None:
            return 1
        while (found := self._form(start + step * count, up=up)) is not None and found[:2] == first[:2]:
            moved = [y + step * count * by for y, by in zip(first[2], self._strides(start), strict=True)]
            if list(found[2]) != moved:
                break
            count += 1
        return count

    def _strides(self, layer: int) -> tuple[int, ...]:
        """Bytes from one of layers alike to the next: weights, biases, and three values in the record."""
        size = self.net.width(layer)
        return 2 * size * size, 4 * size, 32 * size, 32 * size, 32 * size

    def _form(self, layer: int, *, up: bool) -> tuple[Activation, int, tuple[int, ...]] | None:
        """(activation, width, places) of a layer that may stand in a loop."""
        net, plan = self.net, self.plan
        if not 0 < layer < net.depth - 1 or net.reads(layer) != (layer,) or net.widths[layer] != net.widths[layer + 1]:
            return None
        if up:
            if net.adds(layer) is not None:
                return None
            keeps = net.acts[layer].keeps == 2
            preactivation = plan.preactivations[layer] if keeps else 32 * net.width(layer) * layer
            places = plan.weights[layer], plan.vectors[layer], plan.home[layer + 1], preactivation, plan.kept[layer]
            return net.acts[layer], net.widths[layer], places
        if layer in plan.pending or layer < 2 or net.adds(layer - 1) is not None:
            return None
        value = plan.preactivations[layer - 1] if net.acts[layer - 1].keeps == 2 else plan.home[layer]
        left = plan.gradients[layer - 1] if self.parameters else 32 * net.width(layer) * layer
        places = plan.weights[layer], plan.vectors[layer], value, left, plan.kept[layer]
        return net.acts[layer - 1], net.widths[layer], places

    def _part(self, value: int) -> tuple[str, str]:
        """(template arguments, address) of a part of the input matrix."""
        start, width = self.net.parts[-value] if self.net.parts else (0, self.net.columns)
        even = str((start | self.net.columns) % 2 == 0).lower()
        return f"{width}, {self.net.columns}, {even}", f" + {start}" if start else ""

    def _read(self, name: str, value: int) -> list[str]:
        """An earlier value, or a part of the input, as an array."""
        lines = [self._array(name, self.net.width(value))]
        if value <= 0:
            kind, start = self._part(value)
            return [*lines, f"w_read_rows<{kind}>({name}, x{start}, row0, rows, lane);"]
        return [*lines, f"w_recall({name}, {Int('kept') + self.plan.home[value]}, record, lane);"]

    def _summed(self, layer: int) -> list[str]:
        """d, which begins with the bias, += all that a layer reads; what is not there yet is kept."""
        net, tiles = self.net, self.shape.tiles
        n = net.width(layer + 1) // 16
        lines = [f"float d[{tiles}][{2 * n}][4]; w_begin<{n}, {tiles}>(d, {self._vectors(layer)}, lane);"]
        for s in net.segments(layer):
            if s.value == layer and layer > 0:
                lines += self._times(layer, s, f"h{layer}", up=True)
                continue
            place = self.plan.kept[layer] + 512 * s.first
            lines += ["{", *self._read("a", s.value)]
            lines.append(f"w_keep_all({Int('kept') + place}, a, record, lane, live);")
            lines += [*self._times(layer, s, "a", up=True), "}"]
        return lines

    def _up(self) -> list[str]:
        net, plan, tiles = self.net, self.plan, self.shape.tiles
        lines: list[str] = []
        for value, place in plan.home.items():
            if value < 0:
                lines += ["{", *self._read("a", value), f"w_keep_all({Int('kept') + place}, a, record, lane, live); }}"]
        layer = -1
        while (layer := layer + 1) < net.depth - 1:
            if (count := self._run(layer, up=True)) > 1:
                lines += self._loop_up(layer, count)
                layer += count - 1
                continue
            n = net.width(layer + 1) // 16
            act, added = self.acts[net.acts[layer]], net.adds(layer)
            lines += [self._array(f"h{layer + 1}", net.width(layer + 1)), "{", *self._summed(layer)]
            kept = f"{Int('kept') + plan.home[layer + 1]}, {Int('kept') + plan.preactivations[layer]}"
            if added is not None and added.before:
                lines.append(f"w_more<{n}, {tiles}>(d, {Int('kept') + plan.home[added.value]}, record, lane);")
            if added is not None and not added.before:
                own = plan.own.get(layer, 0)
                kept += f", {Int('kept') + own}, {Int('kept') + plan.home[added.value]}"
            name = "w_layer" if added is None or added.before else "w_layer_more"
            lines += self._bounded(layer + 1)
            lines.append(f"{name}<{act}, {n}, {tiles}>(h{layer + 1}, d, {kept}, record, lane, live); }}")
        return lines

    def _loop_up(self, first: int, count: int) -> list[str]:
        """Layers alike."""
        net, plan, tiles = self.net, self.plan, self.shape.tiles
        size, n = net.width(first), net.width(first) // 16
        name, move = f"h{first + count}", f"w_move<{tiles}, {n}>"
        step = f" + l * {32 * size}"
        kept = f"{Int('kept') + plan.home[first + 1]}{step}, {Int('kept') + plan.preactivations[first]}{step}"
        (own,) = net.segments(first)
        others = range(first + 1, first + count)
        return [
            self._array(name, size),
            f"{move}({name}, h{first});",
            f"#pragma unroll 1\nfor (int l = 0; l < {count}; ++l) {{ {self._array('u', size)}",
            f"{{ float d[{tiles}][{2 * n}][4];",
            f"w_begin<{n}, {tiles}>(d, {self._vectors(first, f' + l * {4 * size}')}, lane);",
            *self._times(first, own, name, up=True, turn=f" + l * {2 * size * size}", others=others),
            *self._bounded(first),
            f"w_layer<{self.acts[net.acts[first]]}, {n}, {tiles}>(u, d, {kept}, record, lane, live); }}",
            f"{move}({name}, u); }}",
        ]

    def _loop_down(self, first: int, count: int, left: dict[int, int]) -> list[str]:
        """The same downwards; `first` is the last of them."""
        net, plan, tiles = self.net, self.plan, self.shape.tiles
        size, k = net.width(first), net.width(first) // 16
        act, to = net.acts[first - 1], f"g{first - count}"
        value = plan.preactivations[first - 1] if act.keeps == 2 else plan.home[first]
        step = f" - l * {32 * size}"
        kind, kept = f"{self.acts[act]}, {k}, {tiles}", f"{Int('kept') + value}{step}, record"
        (own,) = net.segments(first)
        others = range(first - 1, first - count, -1)
        for layer in (first, *others):
            left[layer] -= 1
        return [
            self._array(to, size),
            f"w_move<{tiles}, {k}>({to}, g{first});",
            f"#pragma unroll 1\nfor (int l = 0; l < {count}; ++l) {{ {self._array('u', size)}",
            f"{{ w_early<{kind}> early; early.read({kept}, lane);",
            f"float d[{tiles}][{2 * k}][4]; w_zero<{2 * k}, {tiles}>(d);",
            *self._times(first, own, to, up=False, turn=f" - l * {2 * size * size}", others=others),
            *self._bounded(first),
            f"w_below<{kind}>(u, d, early, {kept}, lane); }}",
            *self._keep(first - 1, "u", step),
            f"w_move<{tiles}, {k}>({to}, u); }}",
        ]

    def _down(self) -> list[str]:
        net, plan, tiles = self.net, self.plan, self.shape.tiles
        last = net.depth - 1
        n = net.width(last + 1) // 16
        known: set[int] = set()
        left = _shares(net)
        added = net.adds(last)
        lines = [
            self._array(f"g{last}", net.width(last + 1)),
            f"w_read_rows<{net.widths[-1]}, {net.widths[-1]}, true>(g{last}, dy, row0, rows, lane);",
        ]
        if added is not None and not added.before:
            lines += self._pend(added.value, f"g{last}", known, left)
        if self._whole:
            lines += ["{", *self._summed(last)]
            if added is not None and added.before:
                lines.append(f"w_more<{n}, {tiles}>(d, {Int('kept') + plan.home[added.value]}, record, lane);")
            lines += self._bounded(last + 1)
            lines.append(f"w_last<{self.acts[net.acts[last]]}, {n}, {tiles}>(g{last}, d); }}")
        elif self.parameters:
            lines += self._kept_only(last)
        if added is not None and added.before:
            lines += self._pend(added.value, f"g{last}", known, left)
        lines += self._keep(last, f"g{last}")
        layer = last + 1
        while (layer := layer - 1) >= 0:
            if (count := self._run(layer, up=False)) > 1:
                lines += self._loop_down(layer, count, left)
                layer -= count - 1
                continue
            own = None
            for s in sorted(net.segments(layer), key=lambda s: s.value == layer):
                if s.value == layer and layer > 0:
                    own = s
                elif s.value > 0 or self.inputs:
                    lines += self._share(layer, s, known, left)
            if layer > 0:
                lines += self._below_with(layer, own, known, left)
        for value in sorted(v for v in known if v <= 0):
            lines += self._given(value, [], known)
        return lines

    def _kept_only(self, layer: int) -> list[str]:
        """What a layer reads beside the last value is kept, though its pre-activation is not needed again."""
        lines = []
        for s in self.net.segments(layer):
            if s.value != layer or layer == 0:
                place = self.plan.kept[layer] + 512 * s.first
                lines += [
                    "{",
                    *self._read("a", s.value),
                    f"w_keep_all({Int('kept') + place}, a, record, lane, live); }}",
                ]
        return lines

    def _pend(self, value: int, name: str, known: set[int], left: dict[int, int]) -> list[str]:
        """A share of a value's gradient, to those that are known."""
        left[value] -= 1
        if value <= 0 and not self.inputs:
            return []
        first = str(value not in known).lower()
        known.add(value)
        count = self.net.width(value) // 16
        forms = f"{first}, {count}, {self.shape.tiles}" if name == "d" else f"{first}, {self.shape.tiles}, {count}"
        return [f"w_pend<{forms}>({Int('kept') + self.plan.pending[value]}, {name}, record, lane, live);"]

    def _share(self, layer: int, s: Segment, known: set[int], left: dict[int, int]) -> list[str]:
        """What a layer gives to the gradient of a value that is not the last one."""
        k, tiles = self.net.width(s.value) // 16, self.shape.tiles
        lines = [f"{{ float d[{tiles}][{2 * k}][4]; w_zero<{2 * k}, {tiles}>(d);"]
        lines += self._times(layer, s, f"g{layer}", up=False)
        if s.value <= 0 and left[s.value] == 1:
            left[s.value] = 0
            return [*self._given(s.value, lines, known), "}"]
        return [*lines, *self._pend(s.value, "d", known, left), "}"]

    def _given(self, value: int, lines: list[str], known: set[int]) -> list[str]:
        """The gradient of a part of the input: what stands in d, and what is known of it."""
        k, tiles, x = self.net.width(value) // 16, self.shape.tiles, storage(self.net.input_dtype)
        opened = not lines
        if opened:
            lines = [f"{{ float d[{tiles}][{2 * k}][4]; w_zero<{2 * k}, {tiles}>(d);"]
        if value in known:
            lines.append(f"w_more<{k}, {tiles}>(d, {Int('kept') + self.plan.pending[value]}, record, lane);")
            known.discard(value)
        kind, start = self._part(value)
        lines.append(f"w_input<{kind}, {k}, {x}, {tiles}>(({x}*)dx_{start}, d, row0, rows, lane);")
        return [*lines, "}"] if opened else lines

    def _below_with(self, layer: int, own: Segment | None, known: set[int], left: dict[int, int]) -> list[str]:
        """To the gradient of the pre-activation of the layer below."""
        net, plan, tiles = self.net, self.plan, self.shape.tiles
        act, k = net.acts[layer - 1], net.width(layer) // 16
        added = net.adds(layer - 1)
        value = plan.preactivations[layer - 1] if act.keeps == 2 else plan.own.get(layer - 1, plan.home[layer])
        kind, kept = f"{self.acts[act]}, {k}, {tiles}", f"{Int('kept') + value}, record"
        to = f"g{layer - 1}"
        lines = [
            self._array(to, net.width(layer)),
            f"{{ w_early<{kind}> early; early.read({kept}, lane);",
            f"float d[{tiles}][{2 * k}][4]; w_zero<{2 * k}, {tiles}>(d);",
        ]
        if own is not None:
            left[layer] -= 1
            lines += self._times(layer, own, f"g{layer}", up=False)
        if layer in known:
            lines.append(f"w_more<{k}, {tiles}>(d, {Int('kept') + plan.pending[layer]}, record, lane);")
            known.discard(layer)
        lines += self._bounded(layer)
        if added is not None and not added.before:
            lines += self._pend(added.value, "d", known, left)
        lines.append(f"w_below<{kind}>({to}, d, early, {kept}, lane); }}")
        if added is not None and added.before:
            lines += self._pend(added.value, to, known, left)
        return [*lines, *self._keep(layer - 1, to)]


def _shares(net: Network) -> dict[int, int]:
    """Value -> how many give to its gradient."""
    found: dict[int, int] = {}
    for layer in range(net.depth):
        added = net.adds(layer)
        for value in (*net.reads(layer), *(() if added is None else (added.value,))):
            found[value] = found.get(value, 0) + 1
    return found
