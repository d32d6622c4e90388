"""The engine room: scheduling on the host, and the decode round on the device."""
