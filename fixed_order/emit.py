"""A few words on top of ``llvmlite.ir``: a task function, counted loops, vectors of fixed width.

Vectors are part of the meaning here, not of the machine: LLVM splits ``<32 x float>`` into whatever registers
there are, lane by lane, so the same element-wise operations happen in the same order on every CPU. Nothing
below carries a flag that lets LLVM reassociate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
F64 = ir.DoubleType()
PTR = ir.PointerType()

CONTRACT = ("contract",)
"""Lets a product and the sum it goes into become one instruction. Only where the product is exact in f32, as
that of two bf16 values is: then one rounding happens either way, and the bits are the same."""


def i64(value: int) -> Any:
    """Constant of 64 bits."""
    return ir.Constant(I64, value)


def vector(element: Any, lanes: int) -> Any:
    """Type of a vector."""
    return ir.VectorType(element, lanes)


class Function:
    """A function under construction; ``b`` is the ``llvmlite`` builder at the current place."""

    def __init__(self, module: ir.Module, name: str, kinds: Sequence[Any], *, private: bool = False) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), list(kinds)), name)
        if private:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        self.arguments = self.function.args
        self._entry = self.function.append_basic_block("entry")
        start = self.function.append_basic_block("start")
        self._top = ir.IRBuilder(self._entry).branch(start)
        self.b = ir.IRBuilder(start)

    def constant(self, kind: Any, value: float) -> Any:
        """Constant of a scalar or vector type, the same in all lanes."""
        return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)

    def smaller(self, a: Any, b: Any) -> Any:
        """Smaller of two i64."""
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def local(self, kind: Any, name: str = "") -> Any:
        """Stack memory of one value of ``kind``, aligned for any vector."""
        with self.b.goto_block(self._entry):
            self.b.position_before(self._top)
            place = self.b.alloca(kind, name=name)
            place.align = 64
        place.type = PTR  # llvmlite types what it allocates; pointers of LLVM have no type
        return place

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1, *, some: bool = False) -> Iterator[Any]:
        """Body for ``start, start + step, ..`` below ``stop`` (i64); ``some`` promises at least one round."""
        b = self.b
        before = b.block
        body, after = b.append_basic_block("loop"), b.append_basic_block("after")
        if some:
            b.branch(body)
        else:
            b.cbranch(b.icmp_signed("<", start, stop), body, after)
        b.position_at_end(body)
        index = b.phi(I64)
        index.add_incoming(start, before)
        yield index
        following = b.add(index, i64(step))
        index.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, stop), body, after)
        b.position_at_end(after)

    def at(self, base: Any, index: Any, element: Any) -> Any:
        """Address of an element."""
        return self.b.gep(base, [index], source_etype=element)

    def load(self, base: Any, index: Any, element: Any, lanes: int = 1) -> Any:
        """``lanes`` neighbours from element ``index`` on; one lane is a scalar."""
        kind = element if lanes == 1 else vector(element, lanes)
        return self.b.load(self.at(base, index, element), typ=kind, align=element_size(element))

    def store(self, value: Any, base: Any, index: Any, element: Any) -> None:
        """Write one value or a vector from element ``index`` on."""
        self.b.store(value, self.at(base, index, element), align=element_size(element))

    def splat(self, value: Any, lanes: int) -> Any:
        """Vector of ``lanes`` copies of a scalar."""
        one = self.b.insert_element(
            ir.Constant(vector(value.type, lanes), ir.Undefined), value, ir.Constant(I32, 0)
        )
        return self.b.shuffle_vector(one, one, ir.Constant(vector(I32, lanes), [0] * lanes))

    def widen(self, bits: Any, lanes: int) -> Any:
        """Bf16 bits -> f32, exact."""
        wide = self.b.zext(bits, I32 if lanes == 1 else vector(I32, lanes))
        sixteen = ir.Constant(I32, 16) if lanes == 1 else ir.Constant(wide.type, [16] * lanes)
        return self.b.bitcast(self.b.shl(wide, sixteen), F32 if lanes == 1 else vector(F32, lanes))

    def exact_product_added(self, total: Any, a: Any, b: Any) -> Any:
        """``total + a * b`` where ``a * b`` is exact in f32."""
        return self.b.fadd(total, self.b.fmul(a, b, flags=CONTRACT), flags=CONTRACT)

    def nearest_even(self, value: Any) -> Any:
        """Bf16 bits of an f32 or a vector of them, rounded to nearest, ties to even; a NaN stays one."""
        lanes = value.type.count if isinstance(value.type, ir.VectorType) else 0
        whole, half = (vector(kind, lanes) if lanes else kind for kind in (I32, I16))
        bits = self.b.bitcast(value, whole)
        top = self.b.lshr(bits, self.constant(whole, 16))
        odd = self.b.and_(top, self.constant(whole, 1))
        rounded = self.b.add(bits, self.b.add(odd, self.constant(whole, 0x7FFF)))
        rounded = self.b.lshr(rounded, self.constant(whole, 16))
        quiet = self.b.or_(top, self.constant(whole, 0x40))
        nan = self.b.fcmp_unordered("uno", value, value)
        return self.b.trunc(self.b.select(nan, quiet, rounded), half)

    def prefetch(self, address: Any) -> None:
        """Ask for the cache line of an address, which need not exist."""
        kind = ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
        hint = self.module.globals.get("llvm.prefetch.p0") or ir.Function(
            self.module, kind, "llvm.prefetch.p0"
        )
        self.b.call(hint, [address, *(ir.Constant(I32, n) for n in (0, 3, 1))])

    def halved(self, lanes_of: Any) -> Any:
        """Sum of the lanes of a vector as a scalar: lane j + n/2 is added to lane j, down to one."""
        value = lanes_of
        while value.type.count > 1:
            half = value.type.count // 2
            low, high = (
                self.b.shuffle_vector(value, value, ir.Constant(vector(I32, half), list(part)))
                for part in (range(half), range(half, 2 * half))
            )
            value = self.b.fadd(low, high)
        return self.b.extract_element(value, ir.Constant(I32, 0))


class Task(Function):
    """A function ``void name(int64_t *arguments)`` that works off numbered pieces of work.

    Slot 0 of the arguments counts the pieces taken and slot 1 says how many there are. Every thread that
    enters takes pieces until none is left, so any number of threads may help; which of them does a piece
    changes no bit, because no piece reads what another writes.
    """

    def __init__(self, module: ir.Module, name: str, arguments: Sequence[str]) -> None:
        super().__init__(module, name, [PTR])
        self.names = ("taken", "pieces", *arguments)

    def argument(self, name: str) -> Any:
        """Argument as an i64."""
        slot = self.b.gep(self.arguments[0], [i64(self.names.index(name))], source_etype=I64)
        return self.b.load(slot, typ=I64, name=name)

    def pointer(self, name: str) -> Any:
        """Argument as an address."""
        return self.b.inttoptr(self.argument(name), PTR, name=name)

    @contextmanager
    def pieces(self) -> Iterator[Any]:
        """Body for each piece, after which the function returns; yields the number of the piece."""
        b = self.b
        total = self.argument("pieces")
        head, work, done = (b.append_basic_block(name) for name in ("take", "work", "done"))
        b.branch(head)
        b.position_at_end(head)
        piece = b.atomic_rmw("add", self.arguments[0], i64(1), "monotonic")
        b.cbranch(b.icmp_signed("<", piece, total), work, done)
        b.position_at_end(work)
        yield piece
        b.branch(head)
        b.position_at_end(done)
        b.ret_void()


def element_size(element: Any) -> int:
    """Bytes of a scalar type."""
    return {I16: 2, I32: 4, F32: 4}.get(element, 8)
