from adclr.cli import main

main()
