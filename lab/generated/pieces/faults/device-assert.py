os.write(
    2,
    b"terminate called after throwing an instance of 'c10::Error'\n"
    b"  what():  CUDA error: device-side assert triggered\n",
)
os.abort()
