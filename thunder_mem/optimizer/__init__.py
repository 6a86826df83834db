"""The optimizer as a part of the backward: one parameter's update as an operation of the trace."""
