"""What is known of devices. The trainer's log and the tool that checks it both read this table."""

PEAK_FLOPS = {  # of dense bf16 products per second, by the first of these in its name
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "4090": 165e12,
}
