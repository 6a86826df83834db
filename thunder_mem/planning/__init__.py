"""Planning: from Thunder's joint trace to the trace that runs, with the choice among programs."""
