"""The runtime beside regions: transfers to the host, generator states, facts about devices and tensors."""
