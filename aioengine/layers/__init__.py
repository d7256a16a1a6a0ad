"""Building blocks of models: the operations a device offers, rotary tables and the context of a step."""
