.PHONY: protos
protos:
	.venv/bin/python -m grpc_tools.protoc -Iprotos --python_out=shared --pyi_out=shared --grpc_python_out=shared protos/reprise/v1/*.proto
