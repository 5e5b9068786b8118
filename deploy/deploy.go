// Package deploy embeds the Helm chart, the kustomizations that are rendered from it, and examples.
// Its directory also contains jobs for Nomad.
package deploy

import (
	"bufio"
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// Files contains the directories chart, kustomize and examples.
//
//go:embed all:chart examples kustomize
var Files embed.FS

// Build returns the objects that `kubectl apply -k` applies for the directory dir of the tree. The
// map files has the texts of files to add to the tree or to replace in it, by their paths.
func Build(tree fs.FS, dir string, files map[string]string) ([]*unstructured.Unstructured, error) {
	memory := filesys.MakeFsInMemory()
	err := fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, path)
		return errors.Join(err, memory.WriteFile("/"+path, content))
	})
	for path, text := range files {
		err = errors.Join(err, memory.WriteFile("/"+path, []byte(text)))
	}
	if err != nil {
		return nil, err
	}
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(memory, "/"+dir)
	if err != nil {
		return nil, fmt.Errorf("kustomize build %s: %w", dir, err)
	}
	text, err := built.AsYaml()
	if err != nil {
		return nil, err
	}
	return Parse(text)
}

// Parse returns the objects in a stream of YAML documents.
func Parse(text []byte) (objects []*unstructured.Unstructured, err error) {
	for documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		object := &unstructured.Unstructured{}
		if err == nil {
			err = yaml.Unmarshal(document, &object.Object)
		}
		if err != nil {
			return nil, fmt.Errorf("%w in:\n%s", err, document)
		}
		if len(object.Object) > 0 {
			objects = append(objects, object)
		}
	}
}
