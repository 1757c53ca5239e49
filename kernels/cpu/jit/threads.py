"""Kernels that run on several threads.

numba compiles the body of each parallel loop three additional times: as a kernel, in the kernel's wrapper,
and in the enclosing function. This module has a single such loop, which calls the function passed to it.
"""

from __future__ import annotations

from typing import Any

from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import external

_ir = cgutils.ir
_VOID, _I32, _I64 = _ir.VoidType(), _ir.IntType(32), _ir.IntType(64)
_SHARE = _ir.FunctionType(_VOID, [_I64, _I64])


@intrinsic
def _call(typing_context: Any, address: Any, thread: Any, work: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], _SHARE.as_pointer())
        builder.call(function, arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@external(parallel=True)
def _run(num_threads, function, work):
    if num_threads == 1:
        _call(function, 0, work)
        return
    for thread in prange(num_threads):
        _call(function, thread, work)


def _compiled(dispatcher: Any, kinds: tuple[Any, ...]) -> Any:
    dispatcher.compile(kinds)
    return dispatcher.overloads[kinds]


class _Launch:
    """Emits a launch: arguments are stored in a record on the stack, from which every thread calls the kernel."""

    def __init__(self, kernel: Any, leading: int, arguments: Any) -> None:
        kinds = (types.int64,) * leading + tuple(map(types.unliteral, arguments.types))
        self._compiled = _compiled(kernel.dispatcher, kinds)
        self._run = _compiled(_run.part, (types.int64,) * 3)
        self._leading = leading

    def emit(self, context: Any, builder: Any, num_threads: Any, num_rows: Any, values: Any) -> None:
        record_type = _ir.LiteralStructType([_I32, _I64, _I64, values.type])
        record = cgutils.alloca_once(builder, record_type)
        fields = (_I32(0), num_threads, num_rows, values)
        for i, field in enumerate(fields):
            builder.store(field, cgutils.gep_inbounds(builder, record, 0, i))
        context.add_linking_libs([self._compiled.library, self._run.library])
        share = self._share(context, builder.module, record_type)
        given = [num_threads, builder.ptrtoint(share, _I64), builder.ptrtoint(record, _I64)]
        context.call_internal(builder, self._run.fndesc, self._run.signature, given)
        failed = builder.load(cgutils.gep_inbounds(builder, record, 0, 0))
        with cgutils.if_unlikely(builder, cgutils.is_not_null(builder, failed)):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel's threads",))

    def _share(self, context: Any, module: Any, record_type: Any) -> Any:
        """Return the function that a thread calls with its number and the record's address."""
        name = module.get_unique_name(f"share.{self._compiled.fndesc.mangled_name}")
        share = _ir.Function(module, _SHARE, name)
        share.linkage = "internal"
        builder = _ir.IRBuilder(share.append_basic_block("entry"))
        thread, work = share.args
        record = builder.inttoptr(work, record_type.as_pointer())
        _, num_threads, num_rows, values = (
            builder.load(cgutils.gep_inbounds(builder, record, 0, i)) for i in range(4)
        )
        leading = [thread]
        if self._leading == 2:  # rows first .. last - 1
            ends = (thread, builder.add(thread, _I64(1)))
            leading = [builder.sdiv(builder.mul(num_rows, end), num_threads) for end in ends]
        signature = self._compiled.signature
        arguments = cgutils.unpack_tuple(builder, values, len(signature.args) - len(leading))
        status, _ = context.call_internal_no_propagate(
            builder, self._compiled.fndesc, signature, [*leading, *arguments]
        )
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(_I32(1), cgutils.gep_inbounds(builder, record, 0, 0))
        builder.ret_void()
        return share


@intrinsic
def launch(typing_context: Any, kernel: Any, num_threads: Any, arguments: Any) -> Any:
    """Call kernel(thread, *arguments) for every thread in range(num_threads), each on a separate thread.

    `arguments` is a tuple; its arrays stay alive until all calls have returned.
    """
    launched = _Launch(kernel, 1, arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        launched.emit(context, builder, values[1], _I64(0), values[2])
        return context.get_dummy_value()

    return types.void(kernel, types.int64, arguments), generate


@intrinsic
def launch_rows(typing_context: Any, kernel: Any, num_threads: Any, num_rows: Any, arguments: Any) -> Any:
    """Call kernel(first, last, *arguments) for each thread's share first .. last - 1 of range(num_rows)."""
    launched = _Launch(kernel, 2, arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        launched.emit(context, builder, values[1], values[2], values[3])
        return context.get_dummy_value()

    return types.void(kernel, types.int64, types.int64, arguments), generate
