"""Sizing: from a model, a traffic and a device to memory, time, replicas and money, with the server's own scheduler on a virtual clock."""
