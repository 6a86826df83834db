"""Repairs before autograd, which make Thunder's computation trace correct and functional."""
