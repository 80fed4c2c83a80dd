"""Whether all threads of a block meet at every barrier of a kernel: decides which form its barriers take.

The answer errs to the safe side: a form in which threads may leave is right for every kernel, and costs a reduction
instead of a plain barrier.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from weft.generate.cuda.foreign.cut import BARRIERS, Cut, Item, walk

if TYPE_CHECKING:
    from tree_sitter import Node

_WORD = re.compile(r"[A-Za-z_]\w*")
_OWN = re.compile(r"threadIdx|__shfl\w*|__ballot\w*|__match\w*|__activemask|atomic\w*|clock\w*|__lane\w*|asm|laneid")
"""Words whose value differs from thread to thread."""
_BRANCHES = frozenset(
    {"if_statement", "for_statement", "while_statement", "do_statement", "switch_statement", "conditional_expression",
     "for_range_loop"}
)  # fmt: skip
_LOOPS = frozenset({"for_statement", "while_statement", "do_statement", "switch_statement"})
_LEAVES = frozenset({"break_statement", "continue_statement", "goto_statement", "return_statement"})


def form_of(cut: Cut, padded: bool) -> int:
    """0: all threads meet at every barrier; 1: some may leave before; 2: the same, and barriers count (`_and`, ...)."""
    names, counts, hidden = _meeting(cut)
    if not names:
        return 0
    if not padded and not any(_diverges(cut, x, names, hidden) for x in cut.bound):
        return 0
    return 2 if counts else 1


def meets(cut: Cut) -> bool:
    """Whether a kernel has barriers."""
    return bool(_meeting(cut)[0])


def _meeting(cut: Cut) -> tuple[set[str], bool, set[str]]:
    """Names that stand for a barrier (functions and macros too), whether some count, and macros that hold `return`."""
    macros = cut.unit.macros
    names, hidden = set(BARRIERS), {"return"}
    grew = True
    while grew:
        grew = False
        for name, body in macros.items():
            if name not in names and not names.isdisjoint(body):
                names.add(name)
                grew = True
            if name not in hidden and not hidden.isdisjoint(body):
                hidden.add(name)
                grew = True
        for item in cut.bound:
            if not names.isdisjoint(item.uses) and not item.names <= names:
                names |= item.names
                grew = True
    used = {w for x in cut.bound for w in x.uses}
    for name in list(used):
        used |= macros.get(name, frozenset())
    if used.isdisjoint(BARRIERS):
        return set(), False, hidden
    return names, not used.isdisjoint(BARRIERS - {"__syncthreads"}), hidden - {"return"}


def _diverges(cut: Cut, item: Item, names: set[str], hidden: set[str]) -> bool:
    if names.isdisjoint(item.uses - item.names):
        return False
    if not hidden.isdisjoint(item.uses) or item.node.has_error:
        return True
    body = item.node.child_by_field_name("body")
    if body is None:
        return True
    last = [c for c in body.children if c.is_named][-1:]
    for node in walk(body):
        if node.type == "return_statement" and node not in last:
            return True
    own = _thread_dependent(cut, item)
    for node in walk(body):
        if node.type not in ("identifier", *_LEAVES):
            continue
        if node.type == "identifier" and (node.text is None or node.text.decode() not in names):
            continue
        if _under(node, body, own, names):
            return True
    return False


def _under(node: Node, body: Node, own: set[str], names: set[str]) -> bool:
    """Whether a barrier stands under a condition that depends on the thread, or what leaves a loop of barriers does."""
    inside, conditional = node, False
    above = node.parent
    leaves = node.type in _LEAVES
    while above is not None and above != body:
        if above.type in _BRANCHES:
            conditional |= not own.isdisjoint(_condition(above, inside))
            if not leaves and conditional:
                return True
            if leaves and above.type in _LOOPS:
                words = set(_WORD.findall((above.text or b"").decode("utf-8", "replace")))
                if conditional and not names.isdisjoint(words):
                    return True
        inside, above = above, above.parent
    return False


def _condition(branch: Node, inside: Node) -> set[str]:
    """Words of what decides whether `inside`, a part of the branch, runs."""
    words: set[str] = set()
    for child in branch.children:
        if child == inside or child.type in ("compound_statement", "else_clause"):
            continue
        words |= set(_WORD.findall((child.text or b"").decode("utf-8", "replace")))
    return words


def _thread_dependent(cut: Cut, item: Item) -> set[str]:
    """Names of values that may differ from thread to thread."""
    own = {w for w in cut.unit.through_macros(item.uses) if _OWN.fullmatch(w)}
    own |= {m for m, inner in cut.unit.macros.items() if any(_OWN.fullmatch(w) for w in cut.unit.through_macros(inner))}
    if item not in cut.entry:  # who calls it may pass anything
        declarator = item.node.child_by_field_name("declarator")
        for node in walk(declarator) if declarator is not None else ():
            if node.type == "identifier" and node.text:
                own.add(node.text.decode())
    flows: list[tuple[set[str], set[str]]] = []
    body = item.node.child_by_field_name("body")
    writable = _writable(item)
    for node in walk(body) if body is not None else ():
        if node.type == "init_declarator":
            left, right = node.child_by_field_name("declarator"), node.child_by_field_name("value")
        elif node.type == "assignment_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        elif node.type == "call_expression":
            flows.append(_handed_over(cut, node, writable))
            continue
        else:
            continue
        if left is not None and right is not None:
            # of `a[i]`, `*a` and `a.x` it is `a` that changes; of an array what stands behind its name is a size
            to = set(_WORD.findall((left.text or b"").decode("utf-8", "replace"))[:1])
            flows.append((to, set(_WORD.findall((right.text or b"").decode("utf-8", "replace")))))
    grew = True
    while grew:
        grew = False
        for to, words in flows:
            if not to <= own and not own.isdisjoint(words):
                own |= to
                grew = True
    return own


def _writable(item: Item) -> set[str]:
    """Names of arrays and pointers of a function; the sizes of arrays are none."""
    found = set()
    for node in walk(item.node):
        if node.type in ("array_declarator", "pointer_declarator", "reference_declarator"):
            found |= _declared(node)
    return found


def _declared(node: Node) -> set[str]:
    """Names in a declarator without those in the sizes of its arrays."""
    if node.type == "identifier":
        return {node.text.decode()} if node.text else set()
    size = node.child_by_field_name("size") if node.type == "array_declarator" else None
    return set().union(*(_declared(x) for x in node.children if x != size))


def _handed_over(cut: Cut, call: Node, writable: set[str]) -> tuple[set[str], set[str]]:
    """What a call may change of what it is handed, and all that it is handed."""
    function, arguments = call.child_by_field_name("function"), call.child_by_field_name("arguments")
    text = (arguments.text or b"").decode("utf-8", "replace") if arguments is not None else ""
    words = set(_WORD.findall(text))
    name = (function.text or b"").decode("utf-8", "replace").partition("<")[0] if function is not None else ""
    by_reference = name in cut.unit.macros or any(
        name in x.names and "&" in _parameters(x) for x in cut.kept if x.kind in ("function", "prototype")
    )
    if by_reference:
        return words, words
    return (words & writable) | set(re.findall(r"&\s*([A-Za-z_]\w*)", text)), words


def _parameters(item: Item) -> str:
    """The parameters of a function, as text."""
    declarator = item.node.child_by_field_name("declarator")
    lists = [x for x in walk(declarator) if x.type == "parameter_list"] if declarator is not None else []
    return (lists[0].text or b"").decode("utf-8", "replace") if lists else ""
