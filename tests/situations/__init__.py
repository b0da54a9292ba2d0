"""Training situations that sharding libraries have got wrong, each with the values of one process to compare with."""
