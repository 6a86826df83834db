"""The body of a loop over rows: a region of the program, replayed and differentiated for one block of rows."""
