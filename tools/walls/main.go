// Walls checks the imports of every package against the tables of docs/walls.md and
// ARCHITECTURE.md. They are allow lists: an import that no row names is refused, and so is a name that no import needs any more.
//
//	go run -C tools ./walls ..
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The rooms are listed in one document, their packages in the other.
const (
	overview = "ARCHITECTURE.md"
	document = "docs/walls.md"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "walls: name the directory of the project")
		os.Exit(2)
	}
	problems, err := run(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "walls:", err)
		os.Exit(1)
	}
	for _, problem := range problems {
		fmt.Fprintln(os.Stderr, problem)
	}
	if len(problems) > 0 {
		os.Exit(1)
	}
}

// read reads the tables of the project at root.
func read(root, module string) (*walls, error) {
	var text []byte
	for _, name := range []string{overview, document} {
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return nil, err
		}
		text = append(text, b...)
	}
	w, err := parse(string(text), module)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", document, err)
	}
	return w, nil
}

// run returns what is wrong in the project at root.
func run(root string) ([]string, error) {
	t, err := load(os.DirFS(root))
	if err != nil {
		return nil, err
	}
	w, err := read(root, t.module)
	if err != nil {
		return nil, err
	}
	problems := w.check(t)
	for _, n := range w.never {
		list := exec.Command("go", "list", "-deps", "./"+n.from)
		list.Dir, list.Stderr = root, os.Stderr
		out, err := list.Output()
		if err != nil {
			return nil, fmt.Errorf("list what %s links: %w", n.from, err)
		}
		problems = append(problems, w.linked(n, strings.Fields(string(out)))...)
	}
	return problems, nil
}
