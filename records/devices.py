"""What is known of devices. The trainer's log and the tool that checks it both read this table."""

PEAK_FLOPS = {  # of dense bf16 products per second, by a part of the device's name
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "4090": 165e12,
}
