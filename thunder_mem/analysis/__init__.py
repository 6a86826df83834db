"""Questions that are answered by planning several times: what each budget costs, how large a batch fits."""
