package main

import (
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// trustOf is an environment variable that TestSystemCertificatesReplaceTheEmbeddedOnes sets for the
// processes that it starts. It names the file whose certificates the process must trust. If it is
// empty, the process must trust the certificates in its binary.
const trustOf = "TEST_TRUST_OF"

func TestSystemCertificatesReplaceTheEmbeddedOnes(t *testing.T) {
	if path, asked := os.LookupEnv(trustOf); asked {
		pool, err := x509.SystemCertPool()
		want := x509.NewCertPool()
		certificates, _ := os.ReadFile(path) // none if the path is ""
		read := want.AppendCertsFromPEM(certificates)
		if err != nil || read != (path != "") || pool.Equal(want) != read {
			t.Errorf("the process trusts no authority, or others than those in %q: %v", path, err)
		}
		return
	}
	server := httptest.NewTLSServer(http.NotFoundHandler())
	server.Close()
	authority := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(authority, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
		Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	nowhere := filepath.Join(t.TempDir(), "missing")
	for _, test := range []struct{ name, file, trusted string }{
		{"an image without certificates trusts those in the binary", nowhere, ""},
		{"a system with certificates trusts only those", authority, authority},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestSystemCertificatesReplaceTheEmbeddedOnes$")
			cmd.Env = []string{"SSL_CERT_FILE=" + test.file, "SSL_CERT_DIR=" + nowhere,
				trustOf + "=" + test.trusted}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
