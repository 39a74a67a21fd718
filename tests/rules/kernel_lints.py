"""What the source of a kernel can do wrong without any test noticing, most of the time.

Each lint reads a module's functions in the order of their lines, which in kernels is the order of
execution but for loops, and returns what it finds.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence

COPIES = {"async_load", "async_copy_global_to_shared", "copy_to_shared"}
"""From their second argument into shared memory; the last name is ours for the others."""
LOADS = {"load"} | COPIES
STORES = {"store", "atomic_add", "atomic_cas", "atomic_xchg"}
WAITS = {"gdc_wait"}
TRIGGERS = {"gdc_launch_dependents"}
SHARED_READS = {"warpgroup_mma", "tcgen05_mma", "async_copy_shared_to_global"}
FENCES = {"fence_async_shared"}
COPY_WAITS = ("async_copy.wait_group", "mbarrier.wait")
CLUSTER_ARRIVE, CLUSTER_WAIT = "barrier.cluster.arrive", "barrier.cluster.wait"


def kernels(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions under a `jit` decorator."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            "jit" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            yield node


def early_reads(
    tree: ast.Module,
    constants: set[str],
    imported: Sequence[ast.Module] = (),
) -> list[str]:
    """Loads before the wait for the previous launch of anything but `constants`, and stores, in
    kernels that are launched and wait, or should, since they let the next one start: helpers are
    read where these call them, those of `imported` modules too."""
    own = {function.name: function for function in kernels(tree)}
    called = {name_of(call) for function in own.values() for call in calls_of(function)}
    functions = _functions(tree, imported)
    found = []
    for name, function in own.items():
        triggers = any(name_of(call) in TRIGGERS for call in calls_of(function))
        if name in called or not (triggers or _waits(function, functions)):
            continue
        for call, root, kind in _accesses(function, functions):
            if kind == "store" or (root is not None and root not in constants):
                found.append(f"{name}:{call.lineno} {kind} of {root} before gdc_wait")
    return sorted(set(found))


def _functions(tree: ast.Module, imported: Sequence[ast.Module]) -> dict[str, ast.FunctionDef]:
    """By name; a module's own before those that it imports."""
    return {each.name: each for module in (*imported, tree) for each in kernels(module)}


def _waits(function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> bool:
    """Itself, or in a helper."""
    return any(is_wait(call, functions) for call in calls_of(function))


def is_wait(call: ast.Call, functions: Mapping[str, ast.FunctionDef]) -> bool:
    """Whether it is the wait for the previous launch, or a helper that waits."""
    name = name_of(call)
    others = {each: function for each, function in functions.items() if each != name}
    return name in WAITS or (name in functions and _waits(functions[name], others))


def unfenced_reads(tree: ast.Module, imported: Sequence[ast.Module] = ()) -> list[str]:
    """Tensor-core or bulk-copy reads of shared memory that threads have written, or of copies that
    they have waited for, without a fence between: the two see shared memory through different
    proxies. Helpers that read are followed, those of `imported` modules too."""
    functions = _functions(tree, imported)
    found = []
    for function in kernels(tree):
        written: set[str] = set()
        is_copied = False
        for call in calls_of(function):
            name = name_of(call)
            if name in FENCES:
                written.clear()
                is_copied = False
            elif ast.unparse(call.func).endswith(COPY_WAITS):
                is_copied = True
            elif name == "store" and isinstance(call.func, ast.Attribute) and _is_shared(call):
                written.add(_base(call.func.value))
            elif name == "allocate_shared_memory" and len(call.args) + len(call.keywords) > 3:
                written |= _assigned(function, call)
            elif _multiplies(name, functions):
                read = sorted({_base(argument) for argument in call.args} & written)
                found += [
                    f"{function.name}:{call.lineno} {name} reads {each} without a fence"
                    for each in (*read, *(["copies"] if is_copied else []))
                ]
    return found


def _multiplies(name: str, functions: Mapping[str, ast.FunctionDef]) -> bool:
    """Whether it reads shared memory by tensor cores, or a helper that does."""
    others = {key: function for key, function in functions.items() if key != name}
    return name in SHARED_READS or (
        name in functions
        and any(_multiplies(name_of(call), others) for call in calls_of(functions[name]))
    )


def unwaited_clusters(tree: ast.Module) -> list[str]:
    """Arrivals at a cluster's barrier that no wait follows: a block may leave, and its shared
    memory with it, while another still reads. A function that is named as the instruction is one:
    where it is called counts."""
    found = []
    for function in kernels(tree):
        if function.name == "arrive":
            continue
        open_at: int | None = None
        for line, text in _strings_and_calls(function):
            if CLUSTER_WAIT in text:
                open_at = None
            elif CLUSTER_ARRIVE in text:
                open_at = line
        if open_at is not None:
            found.append(f"{function.name}:{open_at} arrives at the cluster and never waits")
    return found


def calls_of(function: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.end_lineno, call.end_col_offset))


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def _accesses(
    function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]
) -> Iterator[tuple[ast.Call, str | None, str]]:
    """(call, parameter that the pointer comes from, load or store) up to the wait, if there is one;
    helpers followed."""
    for call in calls_of(function):
        name = name_of(call)
        if name in WAITS:
            return
        if name in LOADS | STORES and call.args and not _is_shared(call):
            kind = "load" if name in LOADS else "store"
            pointer = call.args[1 if name in COPIES else 0]
            yield call, _root(pointer, function, call.lineno), kind
        elif name in functions and functions[name] is not function:
            helper = functions[name]
            names = [argument.arg for argument in helper.args.args]
            given = dict(zip(names, call.args, strict=False))
            for _, inner, kind in _accesses(helper, functions):
                if inner in given:
                    yield call, _root(given[inner], function, call.lineno), kind
            if is_wait(call, functions):
                return


def _root(node: ast.expr, function: ast.FunctionDef, line: int) -> str | None:
    """The parameter at the left end of a pointer expression, through assignments above `line`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            node = node.args[0] if _base(node.func.value) in ("tl", "gl") else node.func.value
        elif isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        else:
            return None
    if node.id in {argument.arg for argument in function.args.args}:
        return node.id
    above = [
        item
        for item in ast.walk(function)
        if isinstance(item, ast.Assign)
        and item.lineno < line
        and any(isinstance(t, ast.Name) and t.id == node.id for t in item.targets)
    ]
    if not above:
        return None
    last = max(above, key=lambda item: item.lineno)
    return _root(last.value, function, last.lineno)


def _base(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_shared(call: ast.Call) -> bool:
    """Whether it is a method of a shared-memory descriptor and not tl.load or gl.store."""
    return isinstance(call.func, ast.Attribute) and _base(call.func.value) not in ("tl", "gl", "")


def _assigned(function: ast.FunctionDef, call: ast.Call) -> set[str]:
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and node.value is call
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _strings_and_calls(function: ast.FunctionDef) -> list[tuple[int, str]]:
    """Inline assembly, and calls of the cluster's barrier by name, as that instruction."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.Call):
            dotted = ast.unparse(node.func)
            if dotted.endswith(("cluster.arrive", "cluster.wait")):
                found.append((node.lineno, f"barrier.cluster.{dotted.rpartition('.')[2]}"))
    return sorted(found)
