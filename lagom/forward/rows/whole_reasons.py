"""``WholeReason``: why a forward of a module runs whole on every rank, with the texts that a user reads.

Every place that refuses to split a forward names a member. This file imports no torch, as the driver reads it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class WholeReason(Enum):
    """Reasons why a forward runs whole on every rank.

    A member has a text, which follows "it" in a sentence, and what would help ("" if nothing would). A name in braces
    is a value that the place fills in.
    """

    def __init__(self, text: str, remedy: str = "") -> None:
        self.text, self.remedy = text, remedy

    # Its size and its arguments.
    SMALL = (
        "is small: every rank computes it whole, which is faster than splitting it",
        "batches='split' splits the batches instead, and verify=True tells whether its numbers are the same",
    )
    FEW_ROWS = "is called with fewer rows than there are ranks"
    TORCHSCRIPT = ("is TorchScript, into which lagom does not look", "call the module that was scripted or traced")
    FORWARD_MODE = "is called with derivatives in forward mode"
    UNKNOWN_ARGUMENT = (
        "is called with a {name}, of which it is unknown what is in it",
        "call it with tensors, numbers and texts, in lists, tuples or dicts if there are many",
    )
    IRREGULAR_ARGUMENT = "is called with a sparse or nested tensor, which has no rows to split"
    PACKED_SEQUENCE = (
        "is called with a packed sequence, whose rows are the steps of several sequences",
        "pack the sequences inside of the module that is called, and call it with padded ones",
    )
    EQUAL_ROWS = "is called with rows that are all alike, which does not show whether it mixes them"
    OTHER_INPUT = "was called with other inputs on other ranks"
    MANY_KINDS = "is called in more than {number} ways (types, dimensions, flags or attributes of modules)"
    OTHER_SIZES = "has its rows in the second dimension of its input, and is called with other sizes than at first"
    NEW_SHAPES = "reads numbers of an input whose shapes are new"
    NO_MEMORY = ("cannot be run once more and compared, for lack of memory", "a smaller batch leaves more memory")

    # Its rows and its outputs.
    MIXES_ROWS = "does not compute the rows of its batch one by one"
    BATCH_STATISTICS = "normalises by statistics of the whole batch (BatchNorm in train mode)"
    MORE_BATCHNORMS = "runs BatchNorm another number of times on a part of the batch"
    OUTPUT_WITHOUT_ROWS = "gives an output of shape {shape}, not one with a row for each of {rows}"
    OTHER_OUTPUTS = "gives other outputs for a part of its batch"
    UNKNOWN_OUTPUT = (
        "gives a {name}, of which it is unknown what is in it",
        "return tensors, in a list, tuple or dict if there are many",
    )
    SHARED_MEMORY = (
        "gives tensors that share memory, so that a change of one changes the other",
        "return a copy (clone()) of one of them",
    )
    FAILS_ON_PART = "fails on a part of its batch ({error})"
    FAILS_AFTER_READS = "takes decisions by the numbers of its input, and fails on a part of its batch ({error})"
    FAILS_WITH_OTHER_ROW = "fails when a row of its batch takes the place of another ({error})"
    FAILS_AGAIN = "fails when it is called again ({error})"

    # Numbers that it reads.
    READS_INPUT = (
        "takes decisions by the numbers of its input ({operation})",
        "all(), any(), max(), min() and sum() of rows may be read; torch.where() may replace a mask as an index",
    )
    READS_NOT_BY_ROWS = "takes decisions by the numbers of its input, which do not follow from those of a part"
    READS_AT_LENGTH = "takes decisions by the numbers of its input, which it computes at length"
    READS_OFTEN_OTHERS = "takes decisions by a number of its input that is often another"
    READS_OUT_OF_TORCH = (
        "takes the numbers of its input out of torch, and may decide by them",
        "return the tensor, and read it outside of the forward",
    )
    READS_OTHERS = "reads other numbers for a part of its batch, and may decide by them"

    # Losses that it computes.
    LOSS_NOT_BY_ROWS = "computes a loss in its forward, which is not the sum or mean of its rows' losses"
    LOSS_AGAIN = "computes a loss in its forward, of which a part is computed again or is its own"
    READS_LOSS = (
        "reads a loss that it computes, or a sum or mean of its rows, and may decide by it",
        "read it outside of the forward",
    )
    ROWS_OF_LOSS = "computes its rows from a loss, sum or mean of the batch"

    # Random numbers that it draws.
    DRAWS_OUTSIDE_TORCH = (
        "draws from Python's or numpy's generator, and may decide by it",
        "draw by torch's functions instead, such as torch.rand(()), where no decision depends on the number",
    )
    DRAWS_BY_INPUT = "draws numbers that depend on its input ({operation})"
    DRAWS_OTHERWISE = "draws random numbers in another way on a part of the batch"
    DRAWS_UNEVENLY = "draws random numbers that are not so many for each row"
    DRAWS_FOR_ROWS_AND_OTHERS = "draws random numbers for rows and others in the same way"
    DRAWS_OTHER_AMOUNTS = "draws other amounts of random numbers for a part of its batch"

    # What else sees its forward, or is changed by it.
    HAS_HOOKS = ("has hooks, which would see a part of the batch", "remove them, or return what they look at")
    HAS_GRADIENT_HOOKS = "has hooks on gradients, which would see those of a part of the batch"
    GLOBAL_HOOKS = ("is called with global hooks, which would see a part of the batch", "remove the hooks")
    SETS_HOOK = "sets a hook on a gradient, which would see that of a part of the batch"
    PACKS = "packs what autograd saves, which would be of a part of the batch"
    PRINTS = ("prints, and would print of a part of the batch", "print outside of the forward")
    WRITES = (
        "writes to a file or a log, which an examination would do once more",
        "write files and logs outside of the forward",
    )
    ITERATOR = "has an iterator, of which an examination would take items"
    NOT_RESTORABLE = "{error}, so that an examination could not be undone"
    CHANGES_NUMBERS = (
        "changes numbers among its attributes, or what it can see, by which a later call may go another way",
        "count outside of the forward",
    )
    CHANGES_PARAMETERS = "changes parameters, which an examination would do once more"
    CHANGES_STATE = "changes a buffer or an attribute at each call, of which there would be several"
    CHANGES_INPUT = ("changes its input in place", "change a copy of the input")
    CHANGES_ARGUMENTS = "changes the lists or dicts that it is called with"
    LEAVES_OTHER_VALUES = (
        "leaves other values in its attributes, or in what it can see, for a part of its batch",
        "return these values instead",
    )
    BUFFER_OF_BATCH = "keeps a buffer that depends on the batch"
    KEEPS_RESULT = (
        "keeps a tensor of its forward beside its output, which would be of a part of the batch",
        "return the tensor as well",
    )
    KEEPS_INPUT = "keeps its input, which would be a part of the batch"
    KEEPS_LEAF = "keeps a tensor that it makes a leaf, whose gradient would be that of a part of the batch"
    GIVES_LEAF = "gives a tensor that it makes a leaf, whose gradient would be that of a part of the batch"
    INPUT_AS_LEAF = "makes its input a leaf, whose gradient would be that of a part of the batch"

    # Its backward.
    RUNS_BACKWARD = "runs a backward"
    OWN_BACKWARD = "has a backward of its own that is not by rows, or not in proportion to the gradient that it gets"
    BACKWARD_FAILS = "has a backward that fails when it is run again ({error})"

    # Other ways than at its first calls.
    OTHER_BRANCH = "goes another way than at its first call, by numbers that it reads or draws"
    OFTEN_OTHER_BRANCH = "often goes another way than at its first calls"
    CLOSED_GATE = "has a parameter that is all but zero still, behind which rows may be mixed"

    def filled(self, **values: object) -> FilledReason:
        """Return this reason with the ``values`` of the names in its text."""
        return FilledReason(self, self.text.format(**values) if values else self.text)


class FilledReason(NamedTuple):
    """A reason with its text about one module."""

    reason: WholeReason
    text: str

    def __str__(self) -> str:
        """Return the text, and what would help."""
        return f"{self.text}; {self.reason.remedy}" if self.reason.remedy else self.text


class NotByRowsError(Exception):
    """A forward cannot be split by rows; ``reason`` says why."""

    def __init__(self, reason: WholeReason, **values: object) -> None:
        self.reason = reason.filled(**values)
        super().__init__(self.reason.text)


def whole_line(kind: str, how: str, reason: FilledReason) -> str:
    """Return the line about a module of class ``kind`` that runs whole; ``how`` is a remark on that."""
    return f"{kind} runs whole on every rank{how}: it {reason}"
