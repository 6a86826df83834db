"""Before autograd: what makes Thunder's computation trace correct and functional."""
