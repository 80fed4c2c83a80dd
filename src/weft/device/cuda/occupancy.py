"""How many blocks of a kernel fit into one multiprocessor.

Registers are given to warps in units of 256, from four equal parts of the register file; shared memory in units of 128
bytes, plus what the system reserves per block. A launch is checked as if its warps were a multiple of four: 992 threads
with 65 registers do not start, although 31 warps would fit.

Source: performance notes, section 3, equation (2).
"""

from __future__ import annotations

from weft.device.cuda.record import GpuFacts

WARP = 32
MAX_THREADS = 1024
MAX_REGISTERS = 255


def warp_registers(registers: int) -> int:
    """Registers that a warp takes whose threads use so many each."""
    return _round_up(WARP * registers, 256)


def register_need(threads: int, registers: int) -> int:
    """Registers that a block of so many threads is checked for at launch."""
    return warp_registers(registers) * _round_up(-(-threads // WARP), 4)


def occupancy(facts: GpuFacts, threads: int, shared: int, registers: int) -> int:
    """Blocks of `threads` threads that one multiprocessor holds at once; 0: the kernel cannot start.

    `shared` is static plus dynamic shared memory in bytes per block, `registers` are those of a thread.
    """
    if not 1 <= threads <= MAX_THREADS or not 0 <= registers <= MAX_REGISTERS:
        return 0
    if not 0 <= shared <= facts.shared_per_block or register_need(threads, registers) > facts.registers_per_sm:
        return 0
    warps = -(-threads // WARP)
    by_registers = 4 * (facts.registers_per_sm // 4 // warp_registers(max(registers, 1))) // warps
    by_shared = facts.shared_per_sm // (_round_up(shared, 128) + facts.shared_reserved)
    return min(by_registers, by_shared, facts.threads_per_sm // WARP // warps, facts.blocks_per_sm)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
