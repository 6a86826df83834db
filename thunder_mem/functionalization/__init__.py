"""Writes in place become values before autograd, and programs are right about views and shared memory."""
