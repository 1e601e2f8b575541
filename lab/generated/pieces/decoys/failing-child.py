subprocess.run([sys.executable, "-S", "-c", "raise SystemExit('no GPU here')"], check=False)
