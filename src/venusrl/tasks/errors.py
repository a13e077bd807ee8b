"""The one error of task loading."""


class TaskError(Exception):
    """A task or a set of tasks cannot be used; the message names the directory, the fault and the mend."""
