"""Judging as a service: `opforge serve` takes kernels over HTTP, queues them fairly and stores every answer."""
