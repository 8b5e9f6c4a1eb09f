"""An interpreter of PTX, NVIDIA's virtual machine code, for the kernels of this package: on a CPU, in numpy.

    text.py          PTX text to instructions, with the line of the kernel's source that each comes from
    numbers.py       number formats, rounding, approximate functions
    memory.py        address spaces whose bounds are checked, poisoned at first
    warps.py         the registers of some warps, and their way through the program
    forms.py         the table of instruction forms: an opcode that is not in it is an error
    arithmetic.py    integer and floating-point instructions, comparisons, conversions
    moves.py         loads, stores, moves, exchanges between lanes, branches
    matrices.py      ldmatrix, stmatrix, mma, wgmma
    tensor_memory.py tcgen05: products of Blackwell, and the memory that they write to
    copies.py        cp.async, tensor copies (TMA), mbarriers
    block.py         a thread block: barriers, the order of warps, what completes when
    races.py         which accesses of shared memory no barrier or wait puts in order
    profile.py       counts: instructions, sectors, bank conflicts, bytes
    driver.py        a Triton driver: compiles for an NVIDIA GPU, runs here, on CPU tensors

One block runs at a time. Its warps run together, or one after another, in an order that the caller chooses. Copies
and products that PTX calls asynchronous happen as late as their waits allow, or at once. Neither time nor the machine
code of ptxas (SASS) is modelled; sums inside a matrix product are exact and rounded once.
"""
