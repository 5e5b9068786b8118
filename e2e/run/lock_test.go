package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func there() (bool, error)    { return true, nil }
func notThere() (bool, error) { return false, nil }

// refused checks that a claim fails and that its error contains all the words.
func refused(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("the run has the cluster, want an error that says %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the error does not say %q: %v", word, err)
		}
	}
}

func TestARunDoesNotTouchTheClusterOfAnotherCache(t *testing.T) {
	dir, note := t.TempDir(), filepath.Join(t.TempDir(), "note")
	release, err := claimCluster(dir, "engine-1", "/a/oxide-csi-e2e", notThere, note)
	csitest.Must(t, err)
	_, err = claimCluster(dir, "engine-1", "/b/oxide-csi-e2e", there, note)
	refused(t, err, "the cluster oxide-csi on the Docker engine engine-1", "/a/oxide-csi-e2e",
		"the process "+strconv.Itoa(os.Getpid()), "wait for it to end")
	other, err := claimCluster(dir, "engine-2", "/b/oxide-csi-e2e", notThere, note)
	if err != nil {
		t.Fatalf("another engine has a cluster of its own: %v", err)
	}
	other()
	release()

	t.Log("the first run has kept its cluster")
	_, err = claimCluster(dir, "engine-1", "/b/oxide-csi-e2e", there, note)
	refused(t, err, "was left by another run", "/a/oxide-csi-e2e", "XDG_CACHE_HOME=/a make e2e-down")
	release, err = claimCluster(dir, "engine-1", "/a/oxide-csi-e2e", there, note)
	if err != nil {
		t.Fatalf("a run with the same cache has its cluster: %v", err)
	}
	release()

	t.Log("the cluster was removed")
	release, err = claimCluster(dir, "engine-1", "/b/oxide-csi-e2e", notThere, note)
	csitest.Must(t, err)
	release()
	_, err = claimCluster(dir, "engine-1", "/a/oxide-csi-e2e", there, note)
	refused(t, err, "/b/oxide-csi-e2e")
}

func TestAClusterWithoutARecordIsNotRemoved(t *testing.T) {
	dir, note := t.TempDir(), filepath.Join(t.TempDir(), "note")
	_, err := claimCluster(dir, "engine", "/a/oxide-csi-e2e", there, note)
	refused(t, err, "no run with the cache /a/oxide-csi-e2e has made it")
	csitest.Must(t, os.WriteFile(note, nil, 0o600))
	release, err := claimCluster(dir, "engine", "/a/oxide-csi-e2e", there, note)
	if err != nil {
		t.Fatalf("the note of this cache is of the cluster: %v", err)
	}
	release()
}

func TestTheLockOfACacheNamesItsHolder(t *testing.T) {
	cache := filepath.Join(t.TempDir(), "oxide-csi-e2e")
	unlock, err := lock(cache)
	csitest.Must(t, err)
	_, err = lock(cache)
	refused(t, err, "the cache "+cache, "the process "+strconv.Itoa(os.Getpid()))
	unlock()
	if unlock, err = lock(cache); err != nil {
		t.Fatal(err)
	}
	unlock()
}
