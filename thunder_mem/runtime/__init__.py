"""The runtime beside regions: transfers to the host, generator states, attention on a CPU, facts about devices."""
