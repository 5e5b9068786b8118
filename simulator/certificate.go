package simulator

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// Certificate returns a server's certificate for the given names and addresses, and the file of the
// authority that signed it, which a client must trust. It keeps both in dir, and creates them only
// if there is no valid certificate for these hosts, so that clients still trust a restarted rack.
func Certificate(dir string, hosts []string) (cert tls.Certificate, caFile string, err error) {
	dir = filepath.Join(dir, "tls")
	caFile = filepath.Join(dir, "ca.pem")
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	if cert, err = tls.LoadX509KeyPair(certFile, keyFile); err == nil && goodFor(cert.Leaf, hosts) {
		return cert, caFile, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return cert, "", fmt.Errorf("make a certificate: %w", err)
	}
	files, err := makeCertificate(hosts)
	if err != nil {
		return cert, "", fmt.Errorf("make a certificate: %w", err)
	}
	for i, path := range []string{caFile, keyFile, certFile} {
		if err := engine.WriteDurably(path+".tmp", files[i]); err != nil {
			return cert, "", err
		}
		if err := os.Rename(path+".tmp", path); err != nil {
			return cert, "", fmt.Errorf("make a certificate: %w", err)
		}
	}
	cert, err = tls.LoadX509KeyPair(certFile, keyFile)
	return cert, caFile, err
}

func goodFor(leaf *x509.Certificate, hosts []string) bool {
	for _, host := range hosts {
		if leaf.VerifyHostname(host) != nil {
			return false
		}
	}
	return time.Now().AddDate(0, 1, 0).Before(leaf.NotAfter)
}

// makeCertificate creates an authority and a certificate that it signs. It returns, as PEM, the
// authority, the certificate's key and the certificate. The authority's own key is dropped.
func makeCertificate(hosts []string) (files [3]string, err error) {
	caKey, caErr := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	key, keyErr := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err := errors.Join(caErr, keyErr); err != nil {
		return files, err
	}
	ca := template("simulated rack's authority")
	ca.IsCA, ca.BasicConstraintsValid = true, true
	ca.KeyUsage = x509.KeyUsageCertSign
	leaf := template("simulated rack")
	leaf.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			leaf.IPAddresses = append(leaf.IPAddresses, ip)
		} else {
			leaf.DNSNames = append(leaf.DNSNames, host)
		}
	}
	caDER, caErr := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	leafDER, leafErr := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	keyDER, keyErr := x509.MarshalPKCS8PrivateKey(key)
	for i, block := range []pem.Block{
		{Type: "CERTIFICATE", Bytes: caDER},
		{Type: "PRIVATE KEY", Bytes: keyDER},
		{Type: "CERTIFICATE", Bytes: leafDER},
	} {
		files[i] = string(pem.EncodeToMemory(&block))
	}
	return files, errors.Join(caErr, leafErr, keyErr)
}

func template(name string) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err) // the system has no random numbers
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{Organization: []string{"oxide-simulator"}, CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().AddDate(1, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
}
