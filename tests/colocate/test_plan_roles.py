"""The roles of a plan's steps: the plan's own kernels, byte for byte, or a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.colocate.cuda_plans import cuda_plan, products
from tests.runtime.plans import library_plan

from weft.colocate.plan_roles import longest, name_of, roles_of
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource, Schedule


def test_alike_steps_are_one_role_and_its_kernel_is_the_plans() -> None:
    found, refused = roles_of(products(), cuda_plan())
    assert refused == {} and sorted(x.steps for x in found) == [(0, 2), (1,)]
    for one in found:
        kernel = cuda_plan().steps[one.steps[0]].kernel
        assert one.source == kernel and one.name == name_of(one.source) and one.launch == 0
        assert solo(one.role, one.source.launches[0].entry).text == one.source.text
    assert {x.name.split()[0] for x in found} == {"tma", "loops"}


def test_the_costliest_come_first() -> None:
    plan = cuda_plan()
    dear = replace(plan, steps=tuple(replace(s, cost_us=5.0 if i == 1 else 1.0) for i, s in enumerate(plan.steps)))
    assert [x.weight_us for x in roles_of(products(), plan)[0]] == [2.0, 1.0]
    assert [x.weight_us for x in roles_of(products(), dear)[0]] == [5.0, 2.0]


def of_first(change: dict[str, object], kernel: dict[str, object]) -> Plan:
    first, *rest = cuda_plan().steps
    assert isinstance(first.kernel, CudaSource)
    changed = replace(first, **change, kernel=replace(first.kernel, **kernel))  # type: ignore[arg-type]
    return Plan("changed", (changed, *rest))


@pytest.mark.parametrize(
    ("change", "kernel", "said"),
    [
        ({}, {"text": "another"}, "writes another kernel than the plan has"),
        ({"problem_key": "another"}, {}, "the text differs"),
        ({"members": ()}, {}, "another form of a value"),
        ({"outputs": ()}, {}, "not to be read back"),
        ({}, {"schedule": Schedule("cuda", (("template", "gone"),))}, "no template is called 'gone'"),
    ],
)
def test_what_is_no_role_is_told_by_name(change: dict[str, object], kernel: dict[str, object], said: str) -> None:
    plan = of_first(change, kernel)
    found, refused = roles_of(products(), plan)
    (name,) = refused
    first = plan.steps[0].kernel
    assert isinstance(first, CudaSource) and name == name_of(first) and said in refused[name]
    assert len(found) >= 1, "the others are as they were"


def test_calls_are_no_steps_to_fuse() -> None:
    assert roles_of(products(), library_plan(products())) == ([], {})


def test_of_several_launches_the_one_with_most_shared_memory_has_room() -> None:
    roles = [DeviceRole(128, "", (), (1, 1, 1), shared_bytes=n) for n in (0, 4096, 64)]
    assert longest(RoleSource(Schedule("none"), (), tuple(roles), order=(2, 1, 0))) == 1
